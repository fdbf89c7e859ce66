"""fp8 operands: their scales, and products with them."""
