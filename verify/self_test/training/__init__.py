"""Errors of training that are planted in the engine and in the loop around it: does `verify-plan --train` find them?"""
