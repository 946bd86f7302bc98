"""A discrete-event simulator of colocated and prefill/decode-disaggregated clusters, on the policies of the product."""
