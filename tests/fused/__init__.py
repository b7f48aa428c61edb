"""Tests of qat.codes."""
