"""The experience bank: from finished episodes to lessons in the next prompts, and from their outcomes to training data of the extractor.

Read it in this order: ``bank`` (what operations do), ``store`` (how they last), ``index`` and ``scann_index`` (how entries are found),
``retrieve`` (which of them are shown), ``extractor`` (what the model is asked, how its answers are read), ``buffer`` (what it is trained
on), ``writer``, ``search``, ``calls``, ``pipeline`` and ``merge`` (the moving parts), and ``manager``, the service that joins them.
Importing the package starts nothing.
"""
