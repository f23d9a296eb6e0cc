"""What happens to data: y from x and linear cores, rows from ids and table cores. Both never form the dense matrix."""

from comera_lab.contraction.linear import (
    ContractionPlan,
    Order,
    apply_cores,
    apply_cores_together,
    half_chain_cuts,
    naive_apply_cores,
    plan,
)
from comera_lab.contraction.lookup import DifferentRows, different_rows, lookup_rows, naive_lookup_rows

__all__ = [
    "ContractionPlan",
    "DifferentRows",
    "Order",
    "apply_cores",
    "apply_cores_together",
    "different_rows",
    "half_chain_cuts",
    "lookup_rows",
    "naive_apply_cores",
    "naive_lookup_rows",
    "plan",
]
