"""Who is owed what: shares, usage, quotas that are lent, and what things are worth. Pure sums, no state, no time.

`tree` holds the accounts and their shares; `classic` and `fair_tree` turn usage into a factor for each of them; `drf` is
dominant-resource fairness; `billing` weighs resources against each other; `lending` shares out quotas of a cohort.
Usage over time is kept by `control.accounting.ledger`. Every answer comes as rows that hold all terms of the sum.
"""
