"""Stories of the loop on the real local cluster: Given a deployment with traffic, When something happens, Then ...

One cluster with the chart, a small random model, scripted candidates and ticks of 2 s. What each story asserts is seen
from outside: by the API server, by clients, by the pods' own words. *Promotes* is told by the demo.
"""
