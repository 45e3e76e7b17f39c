"""Linear programs for the planner: scipy's HiGHS, where scipy is installed.

`tierstore.planning.searching.bound` asks; it is pure, and knows only the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.planning.searching.bound import Solve, SparseRows


def find_solver() -> Solve | None:
    """Return what solves linear programs; ``None``: scipy, of the extra ``plan``, is not installed."""
    try:
        import scipy.optimize  # type: ignore[import-untyped] # noqa: F401 - it is optional
    except ImportError:
        return None
    return solve_with_highs


def solve_with_highs(costs: Sequence[float], rows: SparseRows, most: Sequence[float]) -> float | None:
    """Return the least sum of costs: see `tierstore.planning.searching.bound.Solve`.

    Args:
        costs: of each variable.
        rows: what has to hold.
        most: what each variable is at most; all are at least 0.

    Raises:
        ImportError: scipy is not installed.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

    shape = (len(rows.limits), len(costs))
    matrix = coo_matrix((rows.values, (rows.rows, rows.columns)), shape=shape).tocsr()
    bounds = [(0.0, each) for each in most]
    result = linprog(costs, A_ub=matrix, b_ub=rows.limits, bounds=bounds, method="highs")
    return float(result.fun) if result.success else None
