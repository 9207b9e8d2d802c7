// Dynamic loss scale: grows after growth_interval good steps, backs off after an overflow.
#include "../ops.h"

namespace mixprec::cpu {

void update_scale(const ScaleData& data, const ScaleRule& rule) {
  update_scale_rule(*data.scale, *data.growth_tracker, *data.history, *data.found_inf != 0, rule);
}

}  // namespace mixprec::cpu
