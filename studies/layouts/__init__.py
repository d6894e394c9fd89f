"""What do ragged batches gain over padded ones?"""
