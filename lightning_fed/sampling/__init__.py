"""Samplings draw the cohort of a round, from (seed, round) alone.

A sampling is *proper* if every client has a positive probability of being drawn; FedADMM and FedDR converge under
any proper sampling and need no importance weights. FedAvg and FedProx are biased if the probabilities are unequal.

=================== ==================================== ==================================== ==================
scheme              draw                                 probability of client i              may be empty
=================== ==================================== ==================================== ==================
`Full`              all clients                          1                                    no
`Uniform`           S clients, all S-sets alike          S / n                                no
`Bernoulli`         each by its own coin                 p_i                                  if all p_i < 1
`NonemptyBernoulli` coins, until a client is drawn       p_i / (1 - prod_j (1 - p_j))         no
`Blocks`            one of m given blocks                1 / m                                no
`DoublyUniform`     a size j by the law q, then j alike  sum_j q_j j / n                      if q_0 > 0
`Systematic`        S clients, with unequal weights w_i  min(1, kappa w_i), summing to S      no
`WithReplacement`   S draws, duplicates merged           1 - (1 - w_i)^S, with sum w_i = 1    no
`Available`         any of these among online clients    averaged over online sets            if all may be away
=================== ==================================== ==================================== ==================
"""

from lightning_fed.sampling.available import Available
from lightning_fed.sampling.base import Sampler
from lightning_fed.sampling.blocks import Blocks
from lightning_fed.sampling.coins import Bernoulli, NonemptyBernoulli
from lightning_fed.sampling.uniform import DoublyUniform, Full, Uniform
from lightning_fed.sampling.weighted import Systematic, WithReplacement

__all__ = [
    "Available",
    "Bernoulli",
    "Blocks",
    "DoublyUniform",
    "Full",
    "NonemptyBernoulli",
    "Sampler",
    "Systematic",
    "Uniform",
    "WithReplacement",
]
