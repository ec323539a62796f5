"""A module on a mesh of ranks: named sizes, groups by meaning, one function that divides any module. No Lightning."""
