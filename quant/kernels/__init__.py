"""Linear layers over quantized weights, one file for each kernel that multiplies by them."""
