"""What the tests share: small modules, runs of them, recorders, processes. Each file says what it is for."""
