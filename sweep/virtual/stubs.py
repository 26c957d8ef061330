"""Writes the C of the calls that PyTorch needs and that the hand-written sources do not answer.

A call that only computes, or only sets something, is answered with success: its results would be on the device, which
reads as zero. Every other call has something to tell the host that is not known here; it is refused by name.
"""

import re
from collections.abc import Iterable

_LIBRARY_CALL = re.compile(r"(cuda[A-Z]|__cuda|cublas|cudnn|nccl|cusparse|cusolver|cufft|curand|cuFile|cu[A-Z])")

_ONLY_COMPUTES = re.compile(
    r"""
    cublas[CDSZ]s?(gemm|gemv|ger[cu]?|symm|symv|syr|syr2|syr2k|syrk|hemm|hemv|her|her2|her2k|herk|trmm|trmv|trsm
      |trsv|axpy|copy|scal|sscal|swap|rot|rotm|dot[cu]?|getrf|getrs|geqrf)(Batched|StridedBatched|Ex)?(_v2|_64)*
    |cublas(Gemm|GemmStridedBatched|GemmBatched|Sgemm|Cgemm|Dot|Axpy|Scal)Ex(_64)?
    |cublasSet(MathMode|PointerMode|Stream|Workspace|SmCountTarget|AtomicsMode)(_v2)?
    |cublasLtMatmul|cublasLtMatmul(Desc|Preference|AlgoConfig)SetAttribute|cublasLtMatrixLayoutSetAttribute
    |cusparseSetStream|cusparseSetPointerMode|cusolverDnSetStream
    """,
    re.VERBOSE,
)

_REFUSAL_CODES = (
    ("cublas", 15),
    ("cudnn", 3000),
    ("nccl", 5),
    ("cusparse", 10),
    ("cusolver", 9),
    ("cufft", 16),
    ("cuFile", 5001),
)
"""NOT_SUPPORTED of each library; of the runtime and the driver it is 801."""


def missing_calls(needed: Iterable[str], answered: Iterable[str]) -> list[str]:
    """The CUDA calls among the needed names that nothing answers yet, sorted."""
    return sorted({name for name in needed if _LIBRARY_CALL.match(name)} - set(answered))


def is_answered_with_success(call: str) -> bool:
    """Whether success without any result is a true answer to the call."""
    return _ONLY_COMPUTES.fullmatch(call) is not None


def _refusal_code(call: str) -> int:
    return next((code for prefix, code in _REFUSAL_CODES if call.startswith(prefix)), 801)


def write_stubs(calls: Iterable[str]) -> str:
    """The C source that defines the calls."""
    lines = ['#include "vgpu.h"']
    for call in calls:
        if is_answered_with_success(call):
            lines.append(f"EXPORT long {call}(void) {{ return 0; }}")
        else:
            lines.append(f'EXPORT long {call}(void) {{ return vgpu_unsupported("{call}", {_refusal_code(call)}); }}')
    return "\n".join(lines) + "\n"
