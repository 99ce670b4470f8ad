// English is the key; 中文 stands beside it.
const CHINESE = {
  "Runs": "运行", "Curves": "曲线", "Tuning": "调参", "Skip to content": "跳到内容", "now": "刚刚",
  "running": "运行中", "finished": "已完成", "stopped": "已停止", "failed": "失败", "killed": "被终止", "broken": "损坏",
  "pending": "等待中", "done": "完成", "status": "状态", "algorithm": "算法", "environment": "环境", "steps": "步数",
  "return": "回报", "best": "最佳", "speed": "速度", "age": "更新", "faults": "故障", "run": "运行", "course": "走势",
  "Filter": "筛选", "Filter runs by name, algorithm, environment, status": "按名称、算法、环境或状态筛选",
  "Group by": "分组", "nothing": "不分组", "folder": "目录", "algorithm and environment": "算法和环境",
  "Compare": "比较", "Compare %": "比较 %", "Clear": "清除", "select all": "全选", "% runs": "% 个运行",
  "% selected": "已选 %", "No runs yet": "还没有运行", "Start one, it appears here within a second:": "启动一个，一秒内会出现在这里：",
  "No run matches": "没有匹配的运行", "Looking for runs …": "正在查找运行……",
  "% does not exist yet": "% 尚不存在", "live": "实时", "connection lost, trying again": "连接中断，正在重试",
  "connecting": "连接中", "Light": "浅色", "Dark": "深色", "Theme": "主题", "Keyboard": "键盘快捷键", "Language": "语言",
  "This page needs its token": "此页面需要令牌",
  "Open the link that raynforce watch has printed; it ends in #token=…": "请打开 raynforce watch 输出的链接，它以 #token=… 结尾",
  "over": "横轴", "time": "时间", "Smoothing": "平滑", "log y": "对数 y", "log x": "对数 x", "Seeds together": "合并种子",
  "median, and lowest to highest": "中位数，最低到最高", "Reset zoom": "重置缩放", "Copy link": "复制链接", "Link copied": "链接已复制",
  "Choose runs to draw": "请选择要绘制的运行", "Pick them on the left, or in the table of runs.": "在左侧或运行表中选择。",
  "Nothing was reported yet": "尚无数据", "points": "点", "drag to zoom, Shift-drag to pan, wheel to zoom, double-click to reset":
  "拖动缩放，Shift 拖动平移，滚轮缩放，双击重置", "still reading": "仍在读取", "more metrics": "更多指标",
  "Return": "回报", "Evaluation": "评估", "Losses": "损失", "Speed": "速度", "Lag": "滞后", "Replay": "回放", "Time": "时间",
  "Health": "健康", "Other": "其他", "Charts": "图表", "Disk": "磁盘",
  "Overview": "概览", "Settings": "设置", "Faults": "故障", "Checkpoints": "检查点", "Episodes": "回合", "Log": "日志", "Notes": "笔记",
  "Stop": "停止", "Checkpoint now": "立即存档", "Stop this run?": "停止此运行？",
  "It ends after this round, with a checkpoint; resume goes on from it.": "它会在本轮后结束并保存检查点，可用 resume 继续。",
  "Cancel": "取消", "asked: it stops after this round": "已请求：本轮后停止", "asked: a checkpoint after this round": "已请求：本轮后存档",
  "Draw its curves": "绘制曲线", "of %": "共 %", "left": "剩余", "best evaluation": "最佳评估", "target": "目标",
  "What bounds it": "瓶颈", "Where experience flows": "经验流向", "Where the time goes": "时间去向",
  "Samplers": "采样器", "Learner": "学习器", "Environments": "环境", "Roles": "角色", "role": "角色", "state": "状态", "node": "节点",
  "process": "进程", "restarts": "重启", "working": "工作中", "waiting": "等待", "starting": "启动中", "restarting": "重启中",
  "away": "离开", "given up": "已放弃", "ended": "已结束",
  "learner": "学习器", "sampler": "采样器", "evaluator": "评估器", "policy server": "策略服务器", "env hosts": "环境主机",
  "replay": "回放", "replay shards": "回放分片", "samplers": "采样器", "env runners": "环境运行器", "gradient workers": "梯度工作者",
  "steps/s": "步/秒", "in flight": "在途", "lag": "滞后", "updates": "更新", "policy version": "策略版本", "gradients": "梯度",
  "filled": "已填充", "samples per insert": "每插入采样", "observations": "观测", "actions": "动作", "episodes": "回合",
  "env": "环境", "policy": "策略", "other": "其他", "transport": "传输", "prepare": "准备", "learn": "学习", "busy": "忙碌", "wire": "通信",
  "restart": "重启",
  "setting": "设置项", "here": "此处", "Compare with": "对比", "no other run": "不对比", "only differences": "仅差异", "value": "值",
  "The settings are the same": "设置相同", "No faults": "没有故障", "Everything has gone well so far.": "到目前为止一切正常。",
  "what to do": "建议", "evidence": "证据", "first": "首次", "last": "最近", "trace": "回溯", "what it printed last": "最后的输出",
  "see it again": "重现", "step": "步", "written": "写入时间", "size": "大小", "parts": "部分", "torn": "损坏", "No checkpoints yet": "还没有检查点",
  "one is written at the start, then every checkpoint.every steps": "开始时写一个，之后每 checkpoint.every 步写一个",
  "No episodes were filmed": "没有录制回合", "This films three of its best policy:": "录制最佳策略的三个回合：",
  "Nothing has happened yet": "尚无事件", "Save": "保存", "saved": "已保存", "What you want to remember of this run": "关于此运行你想记住的内容",
  "kept in notes.txt of the run": "保存在运行目录的 notes.txt", "This run is gone": "此运行已不存在",
  "It was moved or deleted.": "它被移动或删除了。", "All runs": "所有运行", "trials": "试验", "trial": "试验", "objective": "目标值", "rank": "名次", "seconds": "秒",
  "Parallel coordinates": "平行坐标", "Importance": "重要性", "share of each setting in the outcome": "各设置对结果的影响份额",
  "No searches here": "这里没有搜索", "raynforce tune writes one; it appears here while it runs.": "raynforce tune 会创建一个，运行时显示在这里。",
  "best so far": "目前最佳", "cause": "原因", "runs": "运行", "searched": "搜索", "scheduler": "调度器", "seed": "种子",
  "go to runs": "转到运行", "go to curves": "转到曲线", "go to tuning": "转到调参", "filter": "筛选", "light or dark": "浅色或深色",
  "compare what is selected": "比较所选", "reset zoom": "重置缩放", "this list": "此列表", "Close": "关闭", "next and previous row": "下一行和上一行",
  "open": "打开", "select": "选择", "copied": "已复制", "resumed %×": "已恢复 % 次", "speed now": "当前速度", "lasted": "时长", "hide": "隐藏", "show": "显示",
  "Play all": "全部播放", "Stop all": "全部停止", "Training": "训练", "sample": "采样", "batch": "批量", "result": "结果", "started": "已启动", "fault": "故障",
  "recovered": "已恢复", "checkpoint": "检查点", "It runs elsewhere: figures come every second or so, curves with each checkpoint.": "它在别处运行：数字约每秒更新，曲线随每个检查点更新。",
  "the server failed": "服务器出错", "books": "账目", "produced": "产出", "dropped": "丢弃", "lost": "丢失",
};

const KEY = "raynforce.language";
let chosen = "";
try { chosen = localStorage.getItem(KEY) || ""; } catch { /* private */ }

export function language() {
  if (chosen) return chosen;
  return (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
}

export function speak(next) {
  chosen = next;
  try { localStorage.setItem(KEY, next); } catch { /* private */ }
  document.documentElement.lang = next;
}

export function t(text, ...values) {
  let found = language() === "zh" ? CHINESE[text] || text : text;
  for (const value of values) found = found.replace("%", String(value));
  return found;
}

// Sentences that a run tells, phrase by phrase; options and settings stay as they are typed.
const WHO = {
  "the environment": "环境", "the policy": "策略", "the learner": "学习器", "computing gradients": "计算梯度", "transport between roles": "角色间传输",
  "waiting for each other": "相互等待", "start-up": "启动", "evaluation": "评估", "saving": "保存", "sampling": "采样", "learning": "学习", "training": "训练",
  "their hosts and messages": "主机和消息", "being started or replaced": "启动或替换",
};
const who = (name) => WHO[name.toLowerCase()] || name;
const PHRASES = [
  [/^(.+?) bound this run: it took (\d+ %) of it/, (_, name, share) => `${who(name)}，占本次运行的 ${share}`],
  [/, most of that waiting\. (.+) steps environments side by side/, "，其中大部分是等待。$1 可并行步进环境"],
  [/sampling and learning took turns, (\d+ %) and (\d+ %) of the run: (.+) does both at once/, "采样和学习轮流进行，分别占 $1 和 $2：$3 可同时进行"],
  ["nothing stands out: this run was balanced", "没有明显的瓶颈，各部分均衡"],
  [/(\S.*) uses more of the cluster, if it has free CPUs; or make the environment faster/, "$1 可使用集群的更多空闲 CPU；或者加快环境"],
  ["This machine has one core: --runtime ray uses others, or make the environment faster", "本机只有一个核：--runtime ray 可使用其他机器，或者加快环境"],
  [/All (\d+) cores are in use: --runtime ray uses other machines, or make the environment faster/, "$1 个核都已使用：--runtime ray 可使用其他机器，或者加快环境"],
  [/(-\S.*?) uses all (\d+) cores/, "$1 可用满 $2 个核"],
  [/(-\S.*?) steps more environments with each forward pass; smaller layers \(network\.hidden\) make it cheaper/, "$1 让每次前向计算步进更多环境；更小的层（network.hidden）更省时"],
  ["Fewer or larger updates cost less: ", "更少或更大的更新更省时："],
  ["A smaller network.hidden costs less", "更小的 network.hidden 更省时"],
  [/(-\S.*?) computes more of them at once/, "$1 可同时计算更多梯度"],
  [/(-\S.*?) moves more at a time/, "$1 每次传输更多"], [", and --runtime inline needs none", "，而 --runtime inline 不需要传输"],
  [/(-\S.*?) learns from each fragment as it comes/, "$1 让每个片段一到就学习"],
  [/(-\S.*?) lets nobody wait for the slowest sampler/, "$1 让大家不必等待最慢的采样器"],
  [/(-\S.*?) lets roles meet less often/, "$1 让各角色少碰面"],
  [/(-\S.*?) starts sooner, and a longer run \(--steps\) makes up for it/, "$1 启动更快，更长的运行（--steps）也能摊薄它"],
  ["A longer run (--steps) makes up for it", "更长的运行（--steps）能摊薄它"],
  [/(-\S.*?) evaluates beside training; /, "$1 在训练的同时评估；"], [/(-\S.*?) plays less/, "$1 减少评估"], [/(-\S.*?) saves less often/, "$1 减少保存次数"],
  [/environments were busy (\d+ %) of their time/, "环境有 $1 的时间在工作"],
  [/: (-\S.*?) runs more of them side by side/, "：$1 可并行运行更多环境"],
  [/: they are too quick to be waited for one by one, and (.+) costs less/, "：它们太快，不值得逐个等待，$1 更省时"],
  [/; most of the rest they waited for (.+?), (\d+ %)/, (_, name, share) => `；其余大部分时间在等待${who(name)}，占 ${share}`],
  [": smaller layers (network.hidden) make it cheaper, and central.batch_min=1 waits for nobody", "：更小的层（network.hidden）更省时，central.batch_min=1 不等任何环境"],
  [/: (-\S.*?) spreads them over more hosts/, "：$1 把它们分到更多主机"], [": `raynforce show RUN` tells what broke", "：`raynforce show RUN` 说明出了什么问题"],
  ["sampling bound it: more --samplers, each with a core of its own, or --engine native", "采样：增加 --samplers，每个占一个核，或使用 --engine native"],
  ["learning bound it: fewer epochs, larger minibatches, or --engine native", "学习：减少 epochs，增大 minibatch，或使用 --engine native"],
  [/\b(start-up|evaluation|saving|sampling|learning|training)(?= \d+ ?%)/g, (name) => who(name)],
  // what to do about faults
  ["fix the environment", "请修复环境"], ["; the run went on with a new one", "；运行已用新的环境继续"],
  ["let the environment return finite numbers that fit its spaces", "让环境返回有限且符合其空间的数"],
  [/if it is only slow, raise (.+) or, at the start, (.+)/, "如果只是慢，请提高 $1，启动时则提高 $2"],
  [/if it grows without end, the environment leaks: fix that; (.+) is the limit at which it is replaced/, "如果内存不断增长，说明环境泄漏，请修复；达到 $1 时会被替换"],
  ["native code crashed: torch or its driver", "原生代码崩溃：可能是 torch 或其驱动"], ["native code crashed: most likely the simulator", "原生代码崩溃：很可能是模拟器"],
  ["if that was not you, the kernel was short of memory", "如果不是你做的，就是内核内存不足"],
  [": lower sampling.samplers or sampling.envs, or set faults.memory_mb, so that samplers that grow are replaced before", "：请减小 sampling.samplers 或 sampling.envs，或设置 faults.memory_mb，让增长的采样器提前被替换"],
  [": lower sampling.envs", "：请减小 sampling.envs"],
  ["nothing, if the node was meant to leave; its samplers move to others that have room", "如果节点本来就要离开，则无需处理；它的采样器会移到有空位的节点"],
  ["what it said last, above, tells why", "上面它最后的输出说明了原因"], ["the last lines it printed say more", "它最后的输出说明更多"],
  ["the cause is above: fix that", "原因见上：请修复"], [/\(now ([^)]+)\)/g, "（现为 $1）"],
  // why it ended, and why it cannot be asked
  [/^steps done$/, "步数已完成"], [/^target met$/, "已达到目标"], [/^tune: .*/, "被搜索停止"], [/^paused$/, "已暂停"],
  ["it is not running", "它没有在运行"], [/it runs elsewhere: stop it there, or with (`.+`)/, "它在别处运行：请在那里停止，或用 $1"],
  [/ or (?=-)/g, " 或 "],
];

export function told(text) {
  if (language() !== "zh" || !text) return text;
  return PHRASES.reduce((said, [from, to]) => said.replace(from, to), text).replaceAll(". ", "。");
}
