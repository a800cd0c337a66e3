"""What a pass calls of its model and its KV store: noted from one that ran, called again alone, or left out.

Nothing here takes time or knows a clock; `experiments.kernel_times` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle

from torch import Tensor, nn

from quant.footprint import layer_read_bytes, linear_layers
from specdec.attention import AttentionRule
from specdec.kv_cache import PassLayout
from specdec.runner import ModelRunner


@dataclass
class Product:
    """Linear layers of one kind that a pass calls with as many positions, and what one of them got and gave."""

    name: str
    inputs: Tensor
    output: Tensor
    layers: list[nn.Module] = field(default_factory=list)

    def calls(self) -> Iterator[Callable[[], object]]:
        for layer in self.layers:
            yield partial(layer.forward, self.inputs.clone())

    @property
    def positions(self) -> int:
        """Tokens that a call multiplies."""
        return self.inputs.shape[:-1].numel()

    @property
    def read_bytes(self) -> float:
        """Of the weights of a layer, the mean of all."""
        return sum(map(layer_read_bytes, self.layers)) / len(self.layers)


@dataclass
class Attend:
    """A layer's attention, and what it gave."""

    layer: int
    query: Tensor
    rule: AttentionRule
    output: Tensor


@dataclass
class PassNotes:
    """What one pass called, in order. Of many tensors of one shape, which differ in their numbers, one is kept."""

    kinds: dict[tuple[object, ...], Product] = field(default_factory=dict)
    outputs: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    attends: list[Attend] = field(default_factory=list)
    write: tuple[int, PassLayout, Tensor, Tensor] | None = None

    @property
    def products(self) -> list[Product]:
        return list(self.kinds.values())

    @property
    def attended_positions(self) -> int:
        """Tokens whose queries a layer's attention gets."""
        rows, _, tokens, _ = self.attends[0].query.shape
        return rows * tokens

    def add_product(self, layer: nn.Module, is_head: bool, inputs: Tensor, output: Tensor) -> None:
        width, num_outputs = inputs.shape[-1], output.shape[-1]
        name = f"{getattr(layer, 'kernel', type(layer).__name__)} {num_outputs} x {width}"
        if is_head:
            name += " (head)"
        product = self.kinds.setdefault((name, inputs.shape), Product(name, inputs, output))
        product.layers.append(layer)
        self.outputs.setdefault(layer, []).append(product.output)

    def add_attend(self, layer: int, query: Tensor, rule: AttentionRule, output: Tensor) -> None:
        alike = (one for one in self.attends if one.query.shape == query.shape)
        first = next(alike, None)
        if first is not None:
            query, output = first.query, first.output
        self.attends.append(Attend(layer, query, rule, output))

    def other_than(self, product: Product) -> Callable[[], object]:
        """A call of another kind, if there is one: of the same class rather than not."""
        others = [other for other in self.products if other is not product]
        alike = [other for other in others if type(other.layers[0]) is type(product.layers[0])]
        return next(iter((alike or others or [product])[0].calls()))

    def last_attention(self, runner: ModelRunner) -> Callable[[], object]:
        """Of the last layer, in a pass of its own."""
        return deque(self.attention_calls(runner), maxlen=1).pop()

    def attention_calls(self, runner: ModelRunner) -> Iterator[Callable[[], object]]:
        """All layers', in a pass of their own: what the first makes for all (a mask) is made anew.

        But what a store makes where it is first written to is made before.
        """
        assert self.write is not None
        store = runner.cache.store
        layer, old_layout, keys, values = self.write
        layout = replace(old_layout)
        _ = layout.position_ids  # of the pass, before its first layer
        store.write(layer, layout, keys, values)
        for attend in self.attends:
            yield partial(store.attend, attend.layer, attend.query.clone(), layout, attend.rule)


def note_pass(runner: ModelRunner, one_pass: Callable[[], None]) -> PassNotes:
    """What a pass calls: run twice, the first time since some kernels pack their weights then."""
    one_pass()
    notes = PassNotes()
    store, head = runner.cache.store, runner.model.get_output_embeddings()

    def noting_product(layer: nn.Module) -> Callable[..., Tensor]:
        forward = layer.forward

        def call(inputs: Tensor) -> Tensor:
            output: Tensor = forward(inputs)
            notes.add_product(layer, layer is head, inputs, output)
            return output

        return call

    write, attend = store.write, store.attend

    def noting_write(layer: int, layout: PassLayout, keys: Tensor, values: Tensor) -> None:
        notes.write = notes.write or (layer, layout, keys, values)
        write(layer, layout, keys, values)

    def noting_attend(layer: int, query: Tensor, layout: PassLayout, rule: AttentionRule) -> Tensor:
        output = attend(layer, query, layout, rule)
        notes.add_attend(layer, query, rule, output)
        return output

    with ExitStack() as stack:
        for layer in linear_layers(runner.model):
            stack.enter_context(_replaced(layer, "forward", noting_product(layer)))
        stack.enter_context(_replaced(store, "write", noting_write))
        stack.enter_context(_replaced(store, "attend", noting_attend))
        one_pass()
    return notes


@contextmanager
def hollow(runner: ModelRunner, notes: PassNotes) -> Iterator[None]:
    """Within, the linear layers and the attention of a pass give what they gave before, and compute nothing."""

    def in_turn(outputs: Iterable[Tensor]) -> Callable[..., Tensor]:
        turns = cycle(outputs)
        return lambda *_: next(turns)

    with ExitStack() as stack:
        for layer, outputs in notes.outputs.items():
            stack.enter_context(_replaced(layer, "forward", in_turn(outputs)))
        attention = in_turn([attend.output for attend in notes.attends])
        stack.enter_context(_replaced(runner.cache.store, "attend", attention))
        yield


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An object's own attribute, which hides its class's."""
    own = vars(owner)
    had_own, before = name in own, own.get(name)
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        if had_own:
            own[name] = before
