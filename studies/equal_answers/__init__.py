"""Does every drafter, alone, among others and behind a cached prompt, give the answers of plain decoding?"""
