"""Fairness: shares, lending of quotas, billing. Pure functions, no state.

`tree` holds accounts and shares; `formulas` computes fair-share factors and dominant shares; `billing` weighs
resources; `lending` divides quotas within a cohort. Usage over time is in `control.accounting.ledger`. Results are
rows with every term.
"""
