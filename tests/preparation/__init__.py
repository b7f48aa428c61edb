"""Tests of qat.preparation."""
