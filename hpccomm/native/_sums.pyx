# cython: language_level=3, boundscheck=False, wraparound=False
"""The sums of `exact/sums.py` in C, for numbers that need only two grids: their magnitudes span at most 2^45."""

from libc.math cimport INFINITY, frexp, ldexp
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "sums.h" nogil:
    double sums_largest(const double* x, const double* y, size_t n)
    int sums_of_two_grids(const double* x, size_t n, double limit, double first, double second, uint64_t* sums)
    int sums_of_products(
        const double* x, const double* y, size_t n, double limit, const double* grid, uint64_t* sums)
    int sums_extent(const double* x, size_t n, double* extent)
    void sums_down(
        const double* x, size_t count, size_t columns, size_t stride, double first, double second,
        uint64_t* one, uint64_t* two)


cdef struct Total:  # of chunks: high * 2^32 + low
    int64_t high
    uint64_t low


cdef inline void add(Total* total, uint64_t number) noexcept nogil:
    total.high += <int64_t>number >> 32
    total.low += <uint32_t>number


cdef object whole(Total total):
    return ((<object>total.high) << 32) + total.low


cdef int next_grid(int grid, int spare) noexcept nogil:
    return max(grid - 52 + spare, -1022)


def two_grid_sums(const double[::1] values, size_t start, size_t chunk, int spare, double huge):
    """Add up the values from `start` on, in chunks, until a chunk does not fit the grids of the first chunk.

    Return the start of that chunk and two pairs (integer, exponent); None if not even the first chunk fits.
    `chunk`, `spare` and `huge` are CHUNK, SPARE and HUGE.
    """
    cdef size_t n = values.shape[0], place = start, size
    cdef const double* x = &values[0] if n else NULL
    cdef uint64_t sums[2]
    cdef Total one = Total(0, 0), two = Total(0, 0)
    cdef int above, first, second
    cdef double top, limit
    with nogil:
        top = sums_largest(x + start, NULL, min(chunk, n - start))
        if top < huge:
            frexp(top, &above)
            first = max(above + 1 + spare, -1022)
            second = next_grid(first, spare)
            limit = ldexp(1.0, first - 1 - spare)
            while place < n:
                size = min(chunk, n - place)
                if not sums_of_two_grids(x + place, size, limit, ldexp(1.5, first), ldexp(1.5, second), sums):
                    break
                add(&one, sums[0])
                add(&two, sums[1])
                place += size
    return (place, [(whole(one), first - 52), (whole(two), second - 52)]) if place > start else None


def product_sums(const double[::1] x, const double[::1] y, size_t start, size_t chunk, int spare, double huge):
    """Add up products as `two_grid_sums` does; return the start of the first chunk that does not fit, and 4 pairs."""
    cdef size_t n = x.shape[0], place = start, size, i
    cdef uint64_t sums[4]
    cdef Total totals[4]
    cdef int above
    cdef int first[4]
    cdef double top, limit
    cdef double grid[4]
    if start >= n:
        return None
    with nogil:
        top = sums_largest(&x[start], &y[start], min(chunk, n - start))
        if top < huge:
            frexp(top, &above)
            first[0] = max(above + 1 + spare, -960)
            first[1] = next_grid(first[0], spare)
            first[2] = next_grid(first[0], 0)
            first[3] = next_grid(first[2], spare)
            limit = ldexp(1.0, first[0] - 1 - spare)
            for i in range(4):
                totals[i] = Total(0, 0)
                grid[i] = ldexp(1.5, first[i])
            while place < n:
                size = min(chunk, n - place)
                if not sums_of_products(&x[place], &y[place], size, limit, grid, sums):
                    break
                for i in range(4):
                    add(&totals[i], sums[i])
                place += size
    if place == start:
        return None
    return place, [(whole(totals[i]), first[i] - 52) for i in range(4)]


def extent(const double[::1] values):
    """Return the largest absolute value and the smallest but 0; None if all are 0, or one is not finite."""
    cdef size_t n = values.shape[0]
    cdef double found[2]
    cdef int is_finite
    if n == 0:
        return None
    with nogil:
        is_finite = sums_extent(&values[0], n, found)
    return (found[0], found[1]) if is_finite and found[0] > 0 else None


def add_rows(const double[:, :] rows, int first, int second, size_t chunk, uint64_t[:, ::1] sums, int64_t[:, ::1] totals):
    """Add the sums of rows to `totals`. The numbers fit two grids of these exponents; one of the strides is 8.

    The total of each row on each grid is two numbers, high and low: high * 2^32 + low. `sums` has room for the two sums
    of every row.
    """
    cdef size_t count = rows.shape[0], columns = rows.shape[1], row, start = 0, size
    cdef double grid[2]
    cdef uint64_t found[2]
    grid[0], grid[1] = ldexp(1.5, first), ldexp(1.5, second)
    if count == 0 or columns == 0:
        return
    with nogil:
        while start < columns:
            size = min(chunk, columns - start)
            if rows.strides[1] == sizeof(double):
                for row in range(count):
                    sums_of_two_grids(&rows[row, start], size, INFINITY, grid[0], grid[1], found)
                    sums[0, row], sums[1, row] = found[0], found[1]
            else:
                sums_down(
                    &rows[0, start], size, count, rows.strides[1] // <Py_ssize_t>sizeof(double), grid[0], grid[1],
                    &sums[0, 0], &sums[1, 0])
            for row in range(count):
                totals[0, row] += <int64_t>sums[0, row] >> 32
                totals[1, row] += <uint32_t>sums[0, row]
                totals[2, row] += <int64_t>sums[1, row] >> 32
                totals[3, row] += <uint32_t>sums[1, row]
            start += size
