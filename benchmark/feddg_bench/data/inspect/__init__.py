"""Inspection of data sets: the doctor, contact sheets, signatures."""
