"""One module an operator: its public function, its fake kernel, its CPU kernel."""
