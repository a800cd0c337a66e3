"""What the experiments of the articles share: a laboratory, timing, findings, and a page per experiment."""
