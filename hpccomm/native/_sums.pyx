# cython: language_level=3, boundscheck=False, wraparound=False
"""The sums of `core/exact_sums.py` in C, of numbers for which two grids are enough: a span of 2^45 in magnitude."""

from libc.math cimport frexp, ldexp
from libc.stdint cimport int64_t, uint64_t


cdef extern from "sums.h" nogil:
    double sums_largest(const double* x, size_t n)
    int sums_of_two_grids(const double* x, size_t n, double first, double second, uint64_t* sums)
    int sums_products(const double* x, const double* y, size_t n, double* product, double* error)


def two_grid_sums(const double[::1] values, int spare, double huge):
    """Return an integer, its exponent, another one and its exponent; None if they are not the whole sum.

    `spare` and `huge` are SPARE and HUGE; there are at most CHUNK values.
    """
    cdef size_t n = values.shape[0]
    cdef const double* x = &values[0] if n else NULL
    cdef uint64_t sums[2]
    cdef int above, first, second, is_whole
    cdef double top
    with nogil:
        top = sums_largest(x, n)
        is_whole = top < huge
        if is_whole:
            frexp(top, &above)
            first = max(above + 1 + spare, -1022)
            second = max(first - 52 + spare, -1022)
            is_whole = sums_of_two_grids(x, n, ldexp(1.5, first), ldexp(1.5, second), sums)
    return (<int64_t>sums[0], first - 52, <int64_t>sums[1], second - 52) if is_whole else None


def exact_products(const double[::1] x, const double[::1] y, double[::1] product, double[::1] error):
    """Write the products and their errors, which have as many elements as `x` and `y`; False if one is not exact."""
    cdef size_t n = x.shape[0]
    if n == 0:
        return True
    cdef bint is_exact
    with nogil:
        is_exact = sums_products(&x[0], &y[0], n, &product[0], &error[0])
    return is_exact
