"""Kinds of work, as files of counts name them."""

MATMUL, GROUPED, FLOAT32, FLOAT8 = "matmul", "grouped matmul", "float32 matmul", "float8 matmul"
ATTENTION, ROWS, COPIES, ELEMENTWISE = "attention", "rows", "copies", "elementwise"
HOST = "host"
"""Operations as the host dispatches them, whatever the device does."""
