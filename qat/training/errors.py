"""The one exception that the command turns into plain sentences on standard error and exit status 2."""


class UserError(Exception):
    """Something that the user can mend: a wrong config, a missing folder, a checkpoint of another model.

    Args:
        problems: one or more sentences, each one line: where, what with the value, what would be right.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
