"""Parts of `scripts.roofline_page`: facts, the native models' ops, their times, the page.

Pure but for the data files that `facts` reads.
"""
