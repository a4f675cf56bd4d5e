"""Proves on the user's own machine that the parallel layout changes nothing, and says what the machine has.

python -m d3s_megatron.doctor parity --model FOLDER|tiny --layouts tp1,tp2,pp2,tp2pp2,dp2,tp2sp,pp2vpp2,cp2,tp2cp2
python -m d3s_megatron.doctor env
"""
