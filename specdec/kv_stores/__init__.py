"""KV stores of plain tensors, one file each; quantized ones are in `quant.kv`."""
