"""Fair share, quotas, budgets and limit ranges on one ledger of usage."""
