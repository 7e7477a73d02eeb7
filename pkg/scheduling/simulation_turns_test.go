package scheduling

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"
)

// turns is a world that has more work than room, and items whose turn must come.
type turns struct {
	// nodes is the number of nodes; each has as many cards of 16, and as many CPUs for a card; 8 if that is zero.
	nodes, cards int
	cpu          int64
	fair         fairSharing
	// load is what else the world has.
	load func(c *crowd)
	// item submits an item. It must run within a time. It is stopped a minute later, and the next one submitted, until so many have run.
	item   func(c *crowd, name string) *memberSet
	within time.Duration
	items  int
}

// TestTurns plays worlds in which an item waited for ever, or pods were evicted for nothing, under some rule that was tried.
func TestTurns(t *testing.T) {
	minute := time.Minute
	abc := func(reclaimAfter time.Duration, tenants ...simTenant) fairSharing {
		return fairSharing{tenants: tenants, provisioning: 1, pause: tickInterval, reclaimAfter: reclaimAfter}
	}
	of := func(tenant string, memory int64, lasts time.Duration) podSpec {
		return podSpec{memory: memory, tenant: tenant, lasts: lasts, grace: 2 * time.Second}
	}
	single := func(spec podSpec) func(c *crowd, name string) *memberSet {
		return func(c *crowd, name string) *memberSet { return c.single(name, spec) }
	}
	group := func(size int, spec podSpec) func(c *crowd, name string) *memberSet {
		return func(c *crowd, name string) *memberSet { return c.group(name, size, spec) }
	}
	takesCPU := func(c *crowd) func(name string) *memberSet {
		return func(name string) *memberSet {
			return c.single(name, podSpec{memory: 1, cpu: 1, lasts: c.between(minute/2, 2*minute), grace: time.Second})
		}
	}
	schedulerStops := func(c *crowd) {
		c.after(14*minute, func() { c.scheduler.stopped = c.now + 66*minute }) // The item comes after a quarter of an hour.
		for away := range 66 {
			c.after((14+time.Duration(away))*minute, c.disturbed)
		}
	}
	all := map[string]turns{
		"a large group beside groups of two": {nodes: 4, cards: 2, within: 15 * minute, load: func(c *crowd) {
			c.keepWaiting(8, func(name string) *memberSet { return c.group(name, 2, of("b", 8, c.between(minute, 2*minute))) })
		}, item: group(6, of("a", 16, 0))},
		"100 cards whose pods are replaced at random times": {nodes: 25, cards: 4, within: 30 * minute, load: func(c *crowd) {
			c.keepWaiting(3, func(name string) *memberSet {
				spec := of("b", 8, 5*minute)
				if c.now == 0 {
					spec.lasts = c.between(0, 5*minute)
				}
				return c.single(name, spec)
			})
		}, item: single(of("a", 16, 0))},
		"a pod needs CPU of a node that small pods take, while another pod holds too much of the other node's": {nodes: 2, cards: 2, cpu: 4, within: 10 * minute, load: func(c *crowd) {
			c.single("service", podSpec{memory: 1, cpu: 5})
			c.keepWaiting(3, takesCPU(c))
		}, item: single(podSpec{memory: 16, cpu: 4})},
		"a group needs CPU of two nodes that small pods take": {nodes: 2, cards: 2, cpu: 4, within: 10 * minute, load: func(c *crowd) {
			c.keepWaiting(3, takesCPU(c))
		}, item: group(2, podSpec{memory: 16, cpu: 4})},
		"a tenant of larger weight, for two cards of which the other one's pods always hold one": {
			nodes: 1, cards: 2, within: 60 * minute, fair: abc(0, simTenant{"a", "3"}, simTenant{"b", "1"}), load: func(c *crowd) {
				c.keepWaiting(2, func(name string) *memberSet { return c.single(name, of("b", 16, c.between(4*minute, 5*minute))) })
			}, item: group(2, of("a", 12, 0)),
		},
		"the victims have a grace period of a day": {
			nodes: 1, cards: 2, within: 60 * minute, fair: abc(minute, simTenant{"a", "1"}, simTenant{"b", "1"}), load: func(c *crowd) {
				spec := of("b", 16, 0)
				spec.grace = 24 * time.Hour
				c.array("service", 2, spec)
			}, item: single(of("a", 16, 0)),
		},
		"kube-scheduler is away for an hour": {
			nodes: 1, cards: 2, within: 67 * minute, items: 1, fair: abc(0, simTenant{"a", "1"}, simTenant{"b", "1"}),
			load: schedulerStops, item: single(of("a", 16, 0)),
		},
		"kube-scheduler is away for an hour, and a group waits": {
			nodes: 1, cards: 2, within: 67 * minute, items: 1, fair: abc(0, simTenant{"a", "1"}, simTenant{"b", "1"}),
			load: schedulerStops, item: group(2, of("a", 16, 0)),
		},
		"pods of higher priority take nearly drained cards": {nodes: 1, cards: 4, within: 90 * minute, load: func(c *crowd) {
			c.keepWaiting(3, func(name string) *memberSet { return c.single(name, of("b", 8, c.between(2*minute, 5*minute))) })
			c.again(7*minute, func(name string) *memberSet {
				spec := of("c", 16, 2*minute)
				spec.priority = 100
				return c.single(name, spec)
			})
		}, item: single(of("a", 16, 0))},
		"a small pod beside an endless stream of newcomers": {nodes: 1, cards: 4, within: 20 * minute, items: 5, load: func(c *crowd) {
			c.keepWaiting(20, func(name string) *memberSet { return c.single(name, of("b", 16, c.between(minute, 3*minute))) })
		}, item: single(of("a", 1, 0))},
		"300 shapes wait": {nodes: 10, cards: 4, within: 90 * minute, load: func(c *crowd) {
			for i := range 300 {
				spec := of("b", 1+int64(i)%16, 2*minute)
				spec.cpu, spec.priority = int64(i/16%4), int32(i/64)
				c.single(fmt.Sprint("shape-", i), spec)
			}
			c.keepWaiting(3, func(name string) *memberSet { return c.single(name, of("b", 8, c.between(minute, 2*minute))) })
		}, item: single(of("a", 16, 0))},
		"two cards, and each of two tenants has one more than its share": {
			nodes: 1, cards: 6, within: 60 * minute, fair: abc(minute, simTenant{"a", "1"}, simTenant{"b", "1"}, simTenant{"c", "1"}), load: func(c *crowd) {
				c.array("b", 3, of("b", 16, 0))
				c.runFor(minute)
				c.array("c", 3, of("c", 16, 0))
			}, item: group(2, of("a", 16, 0)),
		},
		"two tenants take one tenant's excess": {
			nodes: 1, cards: 8, within: 60 * minute, fair: abc(minute, simTenant{"a", "1"}, simTenant{"b", "1"}, simTenant{"c", "1"}, simTenant{"d", "1"}),
			load: func(c *crowd) {
				c.array("b", 6, of("b", 16, 0))
				c.array("c", 2, of("c", 16, 0))
				c.after(15*minute, func() { c.waited = append(c.waited, c.array("d", 2, of("d", 16, 0))) })
			}, item: func(c *crowd, name string) *memberSet { return c.array(name, 2, of("a", 16, 0)) },
		},
		"a disruption budget allows one eviction at a time": {
			nodes: 1, cards: 4, within: 60 * minute, fair: abc(minute, simTenant{"a", "1"}, simTenant{"b", "1"}), load: func(c *crowd) {
				c.addBudget("b", simBudgets[0], 3)
				spec := of("b", 8, 0)
				spec.budgets = simBudgets[:1]
				c.array("service", 8, spec)
			}, item: func(c *crowd, name string) *memberSet { return c.array(name, 2, of("a", 16, 0)) },
		},
		"a pool, and an item of the tenant that fits no node of it": {
			nodes: 1, cards: 1, within: 60 * minute, fair: abc(minute, simTenant{"a", "1"}, simTenant{"b", "1"}), load: func(c *crowd) {
				c.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(2)...)
				c.single("service", of("b", 16, 0))
				spec := of("a", 16, 0)
				spec.cpu = 1000
				c.single("never", spec).impossible = true
			}, item: single(of("a", 16, 0)),
		},
		"small pods of other tenants take each new node": {
			nodes: 1, cards: 1, within: 90 * minute, fair: abc(0, simTenant{"a", "1"}, simTenant{"b", "1"}, simTenant{"c", "1"}), load: func(c *crowd) {
				c.autoscale(autoscaling{boot: 2 * minute, empty: 10 * minute}, newPool(8)...)
				for _, tenant := range []string{"b", "c"} {
					for i := range 60 {
						c.single(fmt.Sprint(tenant, i), of(tenant, 4, c.between(minute, 30*minute)))
					}
				}
			}, item: group(4, of("a", 16, 0)),
		},
		"an item that can use one zone only": {
			nodes: 2, cards: 2, within: 60 * minute, fair: abc(minute, simTenant{"a", "1"}, simTenant{"b", "1"}, simTenant{"c", "1"}), load: func(c *crowd) {
				c.api.addNode("z", "z", 16, 16, 16)
				spec := of("b", 16, 0)
				spec.zone = "z"
				c.array("b-z", 2, spec)
				c.runFor(minute)
				c.array("b", 1, of("b", 16, 0))
				c.array("a", 1, of("a", 16, 20*minute))
				c.array("c", 2, of("c", 16, 0))
			}, item: func(c *crowd, name string) *memberSet {
				spec := of("a", 16, 0)
				spec.zone = "z"
				return c.single(name, spec)
			},
		},
	}
	for name, load := range brokenGroups(minute) {
		healthy := turns{nodes: 4, cards: 2, load: load, item: group(7, of("b", 16, 0)), items: 10, within: 40 * time.Second}
		all[name] = healthy
		healthy.fair = abc(0, simTenant{"a", "1"}, simTenant{"b", "9"})
		all[name+", fair sharing"] = healthy
	}
	for name, scene := range all {
		playScene(t, name, worldOptions{replicas: 1, fair: scene.fair}, scene.play)
	}
}

// brokenGroups are loads of groups that can't run, but for a cluster of eight cards. A healthy group waits for one round of a broken one at most.
func brokenGroups(minute time.Duration) map[string]func(c *crowd) {
	broken := func(c *crowd, name string, size int, priority int32) *memberSet {
		specs := slices.Repeat([]podSpec{{memory: 16, tenant: "a", group: name, size: size, priority: priority}}, size)
		specs[size-1].volume = "missing"
		m := newMemberSet(name, specs, slices.Repeat([]string{"a"}, size))
		m.impossible = true
		return c.submitMemberSet(m)
	}
	return map[string]func(c *crowd){
		"a CronJob makes a broken group of half the cluster again and again": func(c *crowd) {
			c.again(5*minute, func(name string) *memberSet { return broken(c, name, 4, 0) })
		},
		"a broken group of higher priority": func(c *crowd) { broken(c, "never", 8, 1) },
		"a broken group of higher priority is made again every 20 seconds": func(c *crowd) {
			c.again(20*time.Second, func(name string) *memberSet { return broken(c, name, 8, 1) })
		},
		"40 broken groups of one namespace": func(c *crowd) {
			for i := range 40 {
				broken(c, fmt.Sprint("never-", i), 1+i%4, int32(i))
			}
		},
		"broken groups of higher priority, beside tiny groups that run": func(c *crowd) {
			for i := range 10 {
				broken(c, fmt.Sprint("never-", i), 2+i%7, 1)
			}
			c.again(20*time.Second, func(name string) *memberSet {
				return c.group(name, 1, podSpec{memory: 1, tenant: "a", lasts: 10 * time.Second})
			})
		},
		"a group whose runs break again and again": func(c *crowd) {
			m := c.group("breaks", 2, podSpec{memory: 16, tenant: "a", priority: 1})
			m.specs[1].refused, m.impossible = time.Hour*24, true
		},
	}
}

// play plays the world.
func (s turns) play(w *world) {
	for i := range s.nodes {
		w.api.addNode(fmt.Sprint("n", i), "a", cmp.Or(s.cpu, 8)*int64(s.cards), slices.Repeat([]int64{16}, s.cards)...)
	}
	c := &crowd{world: w}
	w.watchLiveness()
	s.load(c)
	w.runFor(15 * time.Minute)
	before := w.reserved
	for i := range max(s.items, 1) {
		m := s.item(c, fmt.Sprint("item-", i))
		w.until(s.within, m.name+" runs", m.runs)
		w.runFor(time.Minute)
		m.stop()
	}
	w.until(30*time.Minute, "all run that wait", func() bool { return !slices.ContainsFunc(c.waited, func(m *memberSet) bool { return !m.runs() }) })
	if share := (w.reserved.impossible - before.impossible) / (w.reserved.all - before.all); share > 0.1 {
		w.fail("groups that can't run kept %.0f%% of the memory reserved", 100*share)
	}
}
