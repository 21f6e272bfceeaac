"""Errors that the library raises on purpose.

Exception
├── ValueError
│   ├── QuantizerConfigError        a setting that cannot work
│   ├── CodebookDimensionMismatch   a stored codebook of another size
│   └── OwnerAlreadyActiveError     a pool owner id used twice at once
├── RuntimeError
│   ├── BlockPoolExhaustedError     no free block left
│   ├── CyclicPipelineError         a transform graph with a cycle
│   └── CacheStateError             saved or handed-over state that does not fit the cache
└── FileNotFoundError
    └── ArtifactNotFoundError       a calibration file that is not there
"""


class QuantizerConfigError(ValueError):
    """Raised when a setting, or a combination of settings, cannot work."""


class ArtifactNotFoundError(FileNotFoundError):
    """Raised when a precomputed matrix or codebook is asked for and missing."""


class CyclicPipelineError(RuntimeError):
    """Raised when the stages of a transform pipeline form a cycle."""


class CodebookDimensionMismatch(ValueError):
    """Raised when a loaded codebook has another number of levels than asked for."""


class BlockPoolExhaustedError(RuntimeError):
    """Raised when a pool has too few free blocks and may not grow."""


class OwnerAlreadyActiveError(ValueError):
    """Raised when an owner id is registered while it still holds blocks."""


class CacheStateError(RuntimeError):
    """Raised when saved or handed-over cache state does not fit the cache."""
