"""`pd-shadow admin …`: the operators' side of AdminService."""
