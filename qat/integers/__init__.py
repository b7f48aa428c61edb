"""The integers of a prepared model, without a file format or a runtime.

The way through: `evaluation_copy` leaves what evaluation computes, `freeze` replaces quantizers and layers by modules
that hold their integers, and `Operations` says how these compute. A file format overrides `Operations`.
"""
