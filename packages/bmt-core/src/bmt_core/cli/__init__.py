"""What commands of all packages print with, and ``bmt hang``. The program, click and rich are the
facade's: only commands import this.
"""
