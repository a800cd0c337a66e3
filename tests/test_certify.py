"""`python -m experiments.certify`: exact verifiers are certified, faulty ones are not, bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import certificate, certify
from experiments.certificate import BUILT_IN_PAIRS, Pair, check_faults, check_sampling, check_verifier
from experiments.planted_faults import FAULTS
from specdec.verifiers.base import Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.match import MatchVerifier
from specdec.verifiers.token import TokenVerifier

pytestmark = pytest.mark.usefixtures("one_thread")
PAIR = {"target": [[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], "draft": [[0.2, 0.7, 0.1]]}


def test_the_command_prints_a_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps(PAIR) + "\n\n" + json.dumps(PAIR) + "\n", encoding="utf-8")
    assert certify.main(["verifier=token", f"pairs={pairs}", "draws=500"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"verifiers", "planted_faults", "end_to_end"}
    assert found["verifiers"]["token"]["exact"] is True
    assert found["verifiers"]["token"]["max_tv"] < 1e-12
    assert found["verifiers"]["token"]["cases"] > 20
    assert set(found["planted_faults"]) == set(FAULTS)
    assert all(fault["caught"] and fault["max_tv"] > 1e-3 for fault in found["planted_faults"].values())
    assert found["end_to_end"]["draws"] == 500
    assert 0 < found["end_to_end"]["p_value"] <= 1


@pytest.mark.parametrize("kind", [TokenVerifier, BlockVerifier, MatchVerifier])
def test_every_verifier_is_exact(kind: type[Verifier]) -> None:
    found = check_verifier(kind(), BUILT_IN_PAIRS)
    assert found.is_exact
    assert found.max_tv < 1e-12


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "FAULTS", {name: FAULTS[name]})
    assert check_faults()[name].max_tv > 1e-3


def test_the_sampling_test_sees_a_wrong_law() -> None:
    right = check_sampling(TokenVerifier(), num_draws=2000)
    wrong = check_sampling(FAULTS["wrong_residual"].verifier, num_draws=2000)
    assert right.p_value > 1e-3
    assert wrong.p_value < 1e-6
    assert check_sampling(TokenVerifier(), num_draws=250).power < right.power < 1


def test_a_wrong_verifier_gives_a_failing_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenVerifier, "verify", type(FAULTS["wrong_residual"].verifier).verify)
    monkeypatch.setattr(certify, "check_faults", dict)
    assert certify.main(["verifier=block", "draws=250"]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(certify, "check_faults", dict)
    monkeypatch.setattr(certify, "check_verifier", lambda verifier, pairs: certificate.LawCheck(2e-9, 1))
    assert certify.main(["verifier=token", "draws=250"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verifiers"]["token"]["exact"] is False


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["verifier=nothing"], "unknown verifier 'nothing'; known: block, match, token"),
        (["pairs=/nowhere.jsonl"], "No such file"),
        (["speed=3"], "'speed=3': expected verifier="),
        (["draws=0"], "draws=0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert certify.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert line.startswith("error: ")
    assert reason in line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"target": [[1.0]]}', "'draft'"),
        ('{"target": [[0.5, 0.5]], "draft": [[0.5, 0.5]]}', "1 target laws for 1 draft laws"),
        ('{"target": [[0.5, 0.6], [1, 0]], "draft": [[0.5, 0.5]]}', "is no law"),
        ('{"target": [[0.5, 0.5], [1]], "draft": [[0.5, 0.5]]}', "vocabularies of [1, 2]"),
        ("nonsense", "line 1"),
    ],
)
def test_pairs_that_are_none_are_named(
    line: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert certify.main([f"pairs={path}"]) == 2
    error = capsys.readouterr().err
    assert "line 1" in error
    assert reason in error


def test_the_built_in_pairs_are_laws() -> None:
    for pair in BUILT_IN_PAIRS:
        assert Pair.checked(pair.target, pair.draft) == pair
