"""Tests of the wrappers of engines. A package, so that its conftest.py is not mistaken for the one above."""
