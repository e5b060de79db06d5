"""What the library costs, beside what one would write by hand; `python -m benchmarks` from the checkout."""
