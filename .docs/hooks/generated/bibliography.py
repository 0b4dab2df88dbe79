"""How to cite what the schemes are taken from: BibTeX, by the address that a scheme names as its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A paper or page.

    Attributes:
        key: of the entry.
        authors: as BibTeX has them.
        title: of the work.
        year: of its first version.
    """

    key: str
    authors: str
    title: str
    year: int


WORKS: dict[str, Work] = {
    "https://arxiv.org/abs/1706.03762": Work(
        "vaswani2017attention",
        "Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and Gomez, Aidan N. "
        "and Kaiser, Lukasz and Polosukhin, Illia",
        "Attention Is All You Need",
        2017,
    ),
    "https://arxiv.org/abs/1910.10683": Work(
        "raffel2019t5",
        "Raffel, Colin and Shazeer, Noam and Roberts, Adam and Lee, Katherine and Narang, Sharan and Matena, Michael "
        "and Zhou, Yanqi and Li, Wei and Liu, Peter J.",
        "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
        2019,
    ),
    "https://arxiv.org/abs/2010.11929": Work(
        "dosovitskiy2020vit",
        "Dosovitskiy, Alexey and Beyer, Lucas and Kolesnikov, Alexander and others",
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        2020,
    ),
    "https://arxiv.org/abs/2104.09864": Work(
        "su2021roformer",
        "Su, Jianlin and Lu, Yu and Pan, Shengfeng and Murtadha, Ahmed and Wen, Bo and Liu, Yunfeng",
        "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        2021,
    ),
    "https://arxiv.org/abs/2108.12409": Work(
        "press2021alibi",
        "Press, Ofir and Smith, Noah A. and Lewis, Mike",
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        2021,
    ),
    "https://arxiv.org/abs/2111.06377": Work(
        "he2021mae",
        "He, Kaiming and Chen, Xinlei and Xie, Saining and Li, Yanghao and Doll{\\'a}r, Piotr and Girshick, Ross",
        "Masked Autoencoders Are Scalable Vision Learners",
        2021,
    ),
    "https://arxiv.org/abs/2205.09921": Work(
        "chi2022kerple",
        "Chi, Ta-Chung and Fan, Ting-Han and Ramadge, Peter J. and Rudnicky, Alexander I.",
        "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
        2022,
    ),
    "https://arxiv.org/abs/2212.10554": Work(
        "sun2022xpos",
        "Sun, Yutao and Dong, Li and Patra, Barun and Ma, Shuming and Huang, Shaohan and Benhaim, Alon and Chaudhary, "
        "Vishrav and Song, Xia and Wei, Furu",
        "A Length-Extrapolatable Transformer",
        2022,
    ),
    "https://arxiv.org/abs/2305.19466": Work(
        "kazemnejad2023nope",
        "Kazemnejad, Amirhossein and Padhi, Inkit and Ramamurthy, Karthikeyan Natesan and Das, Payel and Reddy, Siva",
        "The Impact of Positional Encoding on Length Generalization in Transformers",
        2023,
    ),
    "https://arxiv.org/abs/2306.15595": Work(
        "chen2023pi",
        "Chen, Shouyuan and Wong, Sherman and Chen, Liangjian and Tian, Yuandong",
        "Extending Context Window of Large Language Models via Positional Interpolation",
        2023,
    ),
    "https://arxiv.org/abs/2309.00071": Work(
        "peng2023yarn",
        "Peng, Bowen and Quesnelle, Jeffrey and Fan, Honglu and Shippole, Enrico",
        "YaRN: Efficient Context Window Extension of Large Language Models",
        2023,
    ),
    "https://arxiv.org/abs/2310.04418": Work(
        "li2023fire",
        "Li, Shanda and You, Chong and Guruganesh, Guru and Ainslie, Joshua and Ontanon, Santiago and Zaheer, Manzil "
        "and Sanghai, Sumit and Yang, Yiming and Kumar, Sanjiv and Bhojanapalli, Srinadh",
        "Functional Interpolation for Relative Positions Improves Long Context Transformers",
        2023,
    ),
    "https://arxiv.org/abs/2311.00566": Work(
        "fuller2023croma",
        "Fuller, Anthony and Millard, Koreen and Green, James R.",
        "CROMA: Remote Sensing Representations with Contrastive Radar-Optical Masked Autoencoders",
        2023,
    ),
    "https://arxiv.org/abs/2401.01325": Work(
        "jin2024selfextend",
        "Jin, Hongye and Han, Xiaotian and Yang, Jingfeng and Jiang, Zhimeng and Liu, Zirui and Chang, Chia-Yuan and "
        "Chen, Huiyuan and Hu, Xia",
        "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning",
        2024,
    ),
    "https://arxiv.org/abs/2402.13753": Work(
        "ding2024longrope",
        "Ding, Yiran and Zhang, Li Lyna and Zhang, Chengruidong and Xu, Yuanyuan and Shang, Ning and Xu, Jiahang and "
        "Yang, Fan and Yang, Mao",
        "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
        2024,
    ),
    "https://arxiv.org/abs/2402.17463": Work(
        "an2024dualchunk",
        "An, Chenxin and Huang, Fei and Zhang, Jun and Gong, Shansan and Qiu, Xipeng and Zhou, Chang and Kong, "
        "Lingpeng",
        "Training-Free Long-Context Scaling of Large Language Models",
        2024,
    ),
    "https://arxiv.org/abs/2403.00071": Work(
        "wang2024resonance",
        "Wang, Suyuchen and Kobyzev, Ivan and Lu, Peng and Rezagholizadeh, Mehdi and Liu, Bang",
        "Resonance RoPE: Improving Context Length Generalization of Large Language Models",
        2024,
    ),
    "https://arxiv.org/abs/2403.13298": Work(
        "heo2024ropevit",
        "Heo, Byeongho and Park, Song and Han, Dongyoon and Yun, Sangdoo",
        "Rotary Position Embedding for Vision Transformer",
        2024,
    ),
    "https://github.com/meta-llama/llama-models": Work(
        "meta2024llamamodels",
        "{Meta}",
        "llama-models: utilities for the Llama models, apply\\_scaling",
        2024,
    ),
    "https://arxiv.org/abs/2410.06205": Work(
        "barbero2024round",
        "Barbero, Federico and Vitvitskyi, Alex and Perivolaropoulos, Christos and Pascanu, Razvan and "
        "Veli{\\v{c}}kovi{\\'c}, Petar",
        "Round and Round We Go! What makes Rotary Positional Encodings useful?",
        2024,
    ),
    "https://arxiv.org/abs/2410.18745": Work(
        "an2024string",
        "An, Chenxin and Zhang, Jun and Zhong, Ming and Li, Lei and Gong, Shansan and Luo, Yao and Xu, Jingjing and "
        "Kong, Lingpeng",
        "Why Does the Effective Context Length of LLMs Fall Short?",
        2024,
    ),
    "https://arxiv.org/abs/2501.18795": Work(
        "yang2025ropetonope",
        "Yang, Bowen and Venkitesh, Bharat and Talupuru, Dwarak and Lin, Hangyu and Cairuz, David and Blunsom, Phil "
        "and Locatelli, Acyr",
        "Rope to Nope and Back Again: A New Hybrid Attention Strategy",
        2025,
    ),
    "https://arxiv.org/abs/2512.12167": Work(
        "gelberg2025drope",
        "Gelberg, Yoav and Eguchi, Koshi and Akiba, Takuya and Cetin, Edoardo",
        "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings",
        2025,
    ),
    "https://arxiv.org/abs/2602.05258": Work(
        "li2026cope",
        "Li, Haoran and Ren, Sucheng and Yuille, Alan and Wang, Feng",
        "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs",
        2026,
    ),
    "https://kexue.fm/archives/9708": Work("su2023rerope", "Su, Jianlin", "Rectified Rotary Position Embeddings", 2023),
}


def bibtex(source: str) -> str:
    """Return the BibTeX entry of the work at `source`, its title in the case that it has; "" where it is not known.

    Example:
        >>> print(bibtex("https://kexue.fm/archives/9708"))
        @misc{su2023rerope,
          author = {Su, Jianlin},
          title = {{Rectified Rotary Position Embeddings}},
          year = {2023},
          url = {https://kexue.fm/archives/9708},
        }
    """
    work = WORKS.get(source)
    if work is None:
        return ""
    fields = {"author": work.authors, "title": f"{{{work.title}}}", "year": str(work.year)}
    if "arxiv.org" in source:
        fields |= {"eprint": source.rpartition("/")[2], "archivePrefix": "arXiv"}
    lines = [f"  {name} = {{{value}}}," for name, value in (fields | {"url": source}).items()]
    return "\n".join([f"@misc{{{work.key},", *lines, "}"])
