"""What `scripts.roofline_page` is made of: facts, the native models' ops, their times, the page.

Pure but for the data files that `facts` reads.
"""
