"""Where every figure in the docs comes from: a program, and the CSV that it wrote."""
