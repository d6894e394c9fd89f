"""Kernels in C++ that are compiled on first use (`build`), and never required."""
