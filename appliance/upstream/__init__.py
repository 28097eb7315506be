"""The fleet's home: takes in what devices report, says what they should be like, rolls models out. A server's role.

Needs the extra `upstream`; nothing of a device imports it.
"""
