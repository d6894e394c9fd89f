"""Steps of few rows that are captured once and replayed: CUDA graphs over inputs that lie in one place."""
