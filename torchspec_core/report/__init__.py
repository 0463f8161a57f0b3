"""The report: one page that says what was run, what came of it, and how to use it.

`facts` reads the stage folders, `document` arranges them as blocks, `render` writes the blocks as Markdown and as HTML,
`build` is the stage. Numbers are never computed here: they are the ones that the stages recorded.
"""
