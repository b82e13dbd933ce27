"""Fairness: shares, usage, lending of quotas, billing. Pure functions, no state.

`tree` holds accounts and shares; `classic` and `fair_tree` compute fair-share factors from usage; `drf` is
dominant-resource fairness; `billing` weighs resources; `lending` divides quotas within a cohort. Usage over time is
in `control.accounting.ledger`. Results are rows with every term.
"""
