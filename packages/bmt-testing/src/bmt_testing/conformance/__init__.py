"""Conformance kits: tests that an optimizer, a backend or another plugin of your own has to pass.

    pytest --pyargs bmt_testing.conformance --bmt-optimizer lion

Each test is one rule, whose name says it. The plugin is found as bmt finds it, by its entry point;
``--bmt-plugin MODULE`` adds a module that is not installed. After the tests, a table in Markdown
has each rule with its result. Without a name, all that is installed is tested. ``docs/hooks.md``
says what each kit tests.
"""
