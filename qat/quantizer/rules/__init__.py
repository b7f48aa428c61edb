"""The rules, one family a file: what each learns, and how its grid is found."""
