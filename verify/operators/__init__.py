"""Verify one operator, or many: is the annotation true?"""
