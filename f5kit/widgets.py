"""What notebooks call, each in one line: players, tables, figures, live progress, the speaking panel, a blind test.

Everything works with the ipywidgets of versions 7.7 (Colab) and 8, and nothing opens a port. Whatever a button does is
a method, so tests press it without a browser.
"""

from __future__ import annotations

from f5kit.blind import BlindAB
from f5kit.panel import SpeakPanel, run_weights
from f5kit.progress import LiveProgress, is_live
from f5kit.show import Html, Picture, audio_html, latency_figure, loss_figure, mel_figure, players, table

live_progress, speak_panel, blind_ab = LiveProgress, SpeakPanel, BlindAB  # as notebooks call them

__all__ = ["BlindAB", "Html", "LiveProgress", "Picture", "SpeakPanel", "audio_html", "blind_ab", "is_live",
           "latency_figure", "live_progress", "loss_figure", "mel_figure", "players", "run_weights", "speak_panel",
           "table"]  # fmt: skip
