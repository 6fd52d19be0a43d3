"""One module an operator: sample inputs, float64 reference, tolerances, for every test."""
