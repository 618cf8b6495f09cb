"""Dishonest workers, to test that validators catch them: `shoal worker --lie KIND`.

lies           behaviours that change what a worker computes or reports
lying_engines  engines that compute something else than was leased
"""
