"""What would a small pair cost at the size of a large one, with the same answers and the same acceptance?"""
