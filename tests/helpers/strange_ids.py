"""Client ids that file names, encodings, tables and formulas could stumble over."""

STRANGE_IDS: list[int | str] = [
    *(1, "1", -1, "-1", "+1", "01"),
    *("", " ", " a", "a", "A", "é", "e\u0301", "日本", "🦊"),
    *("../x", "/lightning-fed-escaped", "..", "C:\\x", "con", "a/b", "a\0b", "\n", "a\r\nb", "\t"),
    *("\udc80", "\ud800x", "\x1b[31m", "\u202eabc", "\ufeff"),
    *("a,b", 'a"b', "'1'", "a|b", "=1+1", "$\\frac", "$x$", "<b>", "%s", "{}", "${a}", "[red]"),
    *("x" * 10_000, "x" * 9_999 + "y"),
]
