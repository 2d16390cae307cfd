"""A scripted first hour: what a new user types, in a pipe, a terminal, a script, a notebook and a browser.

    python -m tests.first_hour --out FOLDER

leaves `transcript.md` in FOLDER, with pictures of the pages: it is made to be read whole by a person.
"""
